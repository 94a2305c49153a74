"""The engine of a call: checks, packing, planning, and the loop."""
