-- Record a heartbeat of a bucket's owner, and return what it still has.
--
-- KEYS[1]  {bulk_delete_expired_job_artifacts}:occupied_buckets   sorted set, number by second of its last heartbeat
-- KEYS[2]  {bulk_delete_expired_job_artifacts}:bucket_owners      hash, number -> token
-- KEYS[3]  {bulk_delete_expired_job_artifacts}:bucket_state       hash, `max_buckets` as the last tidying had it
-- ARGV[1]  number
-- ARGV[2]  token
--
-- Returns 'ours', 'scaled_down' (still ours, but it exists no longer: to be released soon), or
-- 'lost', and then nothing was changed.

if redis.call('hget', KEYS[2], ARGV[1]) ~= ARGV[2] or not redis.call('zscore', KEYS[1], ARGV[1]) then
  return 'lost'
end
redis.call('zadd', KEYS[1], redis.call('time')[1], ARGV[1])
local max = tonumber(redis.call('hget', KEYS[3], 'max_buckets'))
if max and tonumber(ARGV[1]) >= max then
  return 'scaled_down'
end
return 'ours'
