"""The Lua scripts of this room, one operation a file."""
