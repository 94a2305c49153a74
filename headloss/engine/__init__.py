"""One call: checked, packed, planned, and run in one loop."""
