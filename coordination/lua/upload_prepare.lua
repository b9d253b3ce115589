-- Register an upload that is about to begin, unless its path is being deleted.
--
-- KEYS[1]  {pending_direct_uploads}:pending   sorted set, <location>:<path> by the epoch second of its registration
-- KEYS[2]  {pending_direct_uploads}:deleting  sorted set, member by the epoch second of its next try
-- KEYS[3]  {pending_direct_uploads}:failed    sorted set, member by the epoch second it was given up
-- ARGV[1]  <location>:<path>
--
-- Returns 1 when it is registered, from this second on, 0 when it is being deleted or waits
-- for a person to have it deleted.

if redis.call('zscore', KEYS[2], ARGV[1]) or redis.call('zscore', KEYS[3], ARGV[1]) then
  return 0
end
redis.call('zadd', KEYS[1], redis.call('time')[1], ARGV[1])
return 1
