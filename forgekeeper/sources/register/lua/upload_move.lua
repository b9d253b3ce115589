-- Move uploads from the forge's own register into ours, each with the second of its registration.
--
-- KEYS[1]  the forge's register: a hash, <location>:<path> to the epoch second of its registration
-- KEYS[2]  pending: a sorted set, <location>:<path> by the same second
-- ARGV     field and value of each, as they were read: a field that has another value by now, or none, is left
--
-- Returns how many were moved.  The two keys share no hash tag, as the forge has named one of them: no Redis Cluster.

local moved = 0
for i = 1, #ARGV, 2 do
  local member, value = ARGV[i], ARGV[i + 1]
  if redis.call('hget', KEYS[1], member) == value then
    -- A pending entry keeps its time: it was registered by another way, or adopted.
    redis.call('zadd', KEYS[2], 'nx', value, member)
    redis.call('hdel', KEYS[1], member)
    moved = moved + 1
  end
end
return moved
