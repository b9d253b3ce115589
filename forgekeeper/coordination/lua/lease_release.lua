-- Release a lease, but only while it is still its owner's.
--
-- KEYS[1]  forgekeeper:{leases}:until   sorted set, name by the second it expires
-- KEYS[2]  forgekeeper:{leases}:since   sorted set, name by the second it was taken
-- KEYS[3]  forgekeeper:{leases}:owners  hash, name -> token, a space, and the holder for people to read
-- ARGV[1]  name
-- ARGV[2]  owner, as in the hash
--
-- Returns 1 when it was released, 0 when it was not its owner's any more.

if redis.call('hget', KEYS[3], ARGV[1]) ~= ARGV[2] then
  return 0
end
redis.call('zrem', KEYS[1], ARGV[1])
redis.call('zrem', KEYS[2], ARGV[1])
redis.call('hdel', KEYS[3], ARGV[1])
return 1
