-- Look at some fields of the forge's own register, and change nothing; a thousand take a millisecond or two.
--
-- KEYS[1]  the forge's register: a hash, <location>:<path> to the epoch second of its registration, in decimal
-- ARGV[1]  cursor at which to begin; 0 is the start
-- ARGV[2]  about how many fields to look at
-- ARGV[3]  how long past its registration a field is due, in seconds
-- ARGV[4]  how far ahead a registration may lie, in seconds
-- ARGV[5]  1 to return those that are due
--
-- Returns the cursor to go on at, 0 at the end; how many fields it has looked at; how many of them are due; the first
-- second at which one of these was registered, or ''; how many have a value that is no such second; one of these, or
-- ''; and of those that are due field and value, one after the other.

local now = redis.call('time')[1]
local last, latest = now - ARGV[3], now + ARGV[4]
local cursor, found = unpack(redis.call('hscan', KEYS[1], ARGV[1], 'count', ARGV[2]))
local due, unreadable, first, unread, names = 0, 0, nil, '', {}
for i = 1, #found, 2 do
  local second = string.match(found[i + 1], '^%d+$') and tonumber(found[i + 1])
  if not second or second > latest then
    unreadable, unread = unreadable + 1, found[i]
  elseif second <= last then
    due, first = due + 1, math.min(first or second, second)
    if ARGV[5] == '1' then
      table.insert(names, found[i])
      table.insert(names, found[i + 1])
    end
  end
end
return {cursor, #found / 2, due, first or '', unreadable, unread, names}
