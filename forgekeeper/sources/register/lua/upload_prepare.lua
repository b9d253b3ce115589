-- Register an upload that is about to begin, unless its path is being deleted.
--
-- KEYS[1]  pending: a sorted set, <location>:<path> by the epoch second of its registration
-- KEYS[2]  deleting: a sorted set, member by the epoch second of its next try
-- KEYS[3]  failed: a sorted set, member by the epoch second of its last failure
-- KEYS[4]  adopted: a sorted set, member by the epoch second of its adoption
-- ARGV[1]  <location>:<path>
--
-- Returns 1 when it is registered, from this second on, 0 when it is being deleted, has failed to be, or was adopted.
-- Without KEYS[4], which older producers do not give, an adopted path is taken over: it is the producer's from then on.

local adopted = KEYS[4] and redis.call('zscore', KEYS[4], ARGV[1]) and redis.call('zscore', KEYS[1], ARGV[1])
if adopted or redis.call('zscore', KEYS[2], ARGV[1]) or redis.call('zscore', KEYS[3], ARGV[1]) then
  return 0
end
redis.call('zrem', KEYS[4] or string.gsub(KEYS[1], ':pending$', ':adopted'), ARGV[1])
redis.call('zadd', KEYS[1], redis.call('time')[1], ARGV[1])
return 1
