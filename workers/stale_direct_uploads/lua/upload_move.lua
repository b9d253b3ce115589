-- Move uploads from the forge's own register into ours, each with the second of its registration.
--
-- KEYS[1]  pending_direct_uploads            hash, <location>:<path> to the epoch second of its registration
-- KEYS[2]  {pending_direct_uploads}:pending  sorted set, <location>:<path> by the same second
-- ARGV     of each its field, and the value that was read: one that has another by now, or is gone, stays as it is
--
-- Returns how many were moved.  The two keys share no hash tag, as the forge has named one of them: no Redis Cluster.

local moved = 0
for i = 1, #ARGV, 2 do
  local member, value = ARGV[i], ARGV[i + 1]
  if redis.call('hget', KEYS[1], member) == value then
    -- What stands there already keeps its time: it was registered by another way, or adopted.
    redis.call('zadd', KEYS[2], 'nx', value, member)
    redis.call('hdel', KEYS[1], member)
    moved = moved + 1
  end
end
return moved
