"""What a user gives, packed when it is made: batch, segments, totals and reductions."""
