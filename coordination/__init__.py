"""What processes must agree on through Redis; `coordination.lua` holds one operation a file."""
