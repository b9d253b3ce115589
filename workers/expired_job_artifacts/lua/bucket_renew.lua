-- Record a heartbeat of a bucket's owner, and return why it has to end.
--
-- KEYS[1]  {bulk_delete_expired_job_artifacts}:occupied_buckets   sorted set, number by second of its last heartbeat
-- KEYS[2]  {bulk_delete_expired_job_artifacts}:bucket_owners      hash, number -> token
-- KEYS[3]  {bulk_delete_expired_job_artifacts}:bucket_state       hash, `max_buckets` as the last tidying had it
-- ARGV[1]  number
-- ARGV[2]  token
--
-- Returns nil, 'scale_down' (still its own, but it exists no longer: to be released soon), or
-- 'bucket_lost', and then nothing was changed.

if redis.call('hget', KEYS[2], ARGV[1]) ~= ARGV[2] or not redis.call('zscore', KEYS[1], ARGV[1]) then
  return 'bucket_lost'
end
redis.call('zadd', KEYS[1], redis.call('time')[1], ARGV[1])
local max = tonumber(redis.call('hget', KEYS[3], 'max_buckets'))
if max and tonumber(ARGV[1]) >= max then
  return 'scale_down'
end
return nil
