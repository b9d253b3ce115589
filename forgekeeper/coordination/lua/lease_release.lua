-- Release a lease, but only while it is still its holder's.
--
-- KEYS[1]  forgekeeper:lease:<name>  string that expires, the holder's value
-- ARGV[1]  the value
--
-- Returns 1 when it was released, 0 when it was not its holder's any more.

if redis.call('get', KEYS[1]) == ARGV[1] then
  return redis.call('del', KEYS[1])
end
return 0
