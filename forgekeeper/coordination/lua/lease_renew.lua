-- Let a lease live on, but only while it is still its holder's.
--
-- KEYS[1]  forgekeeper:lease:<name>  string that expires, the holder's value
-- ARGV[1]  the value
-- ARGV[2]  time to live, in milliseconds
--
-- Returns 1 when it was renewed, 0 when it has expired or is another's, and then nothing was changed.

if redis.call('get', KEYS[1]) == ARGV[1] then
  return redis.call('pexpire', KEYS[1], ARGV[2])
end
return 0
