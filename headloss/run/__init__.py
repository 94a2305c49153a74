"""One call: prepared once per signature, planned, and run in one loop."""
