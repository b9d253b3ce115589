-- Settle entries: those that a claim still holds; by a person, those that have failed or were adopted; by the next run,
-- those whose objects an attempt has deleted that ended before it could settle them.
--
-- KEYS       pending, deleting, failed, attempts, claims, adopted: see `RegisterKeys`
-- ARGV[1]    'forget': drop the entry; 'put_back': it is due at once; 'fail': count a failed attempt;
--            'retry': one that has failed is due at once, with all its attempts; 'withdraw': drop an adopted one
--            'found_deleted': drop one whose object the attempt deleted that held it and has ended
-- ARGV[2]    token of the claim; '' for those by a person and 'found_deleted'; a person leaves to a claim what it holds
-- ARGV[3]    of 'fail': after how many attempts the entry moves to failed
-- ARGV[4]    of 'fail': how long to wait after the first attempt, in seconds; doubled after each further one
-- ARGV[5..]  members
--
-- Returns for each member 1 when that was done, of 'fail' when it is in failed now; else 0, and -1 when a claim holds
-- what was to be withdrawn.  A call that is repeated after a lost reply changes nothing more.

local pending, deleting, failed, attempts, claims, adopted = unpack(KEYS)
local what, token = ARGV[1], ARGV[2]
local now = tonumber(redis.call('time')[1])

-- One command for each key, whatever the number of members: a command costs more than an entry.
local function drop(...)
  for _, key in ipairs({deleting, failed, adopted}) do
    redis.call('zrem', key, ...)
  end
  redis.call('hdel', attempts, ...)
  redis.call('hdel', claims, ...)
  return 1
end

local of_claim = {
  forget = function()
    return 1 -- dropped with the others, at the end
  end,
  put_back = function(member)
    redis.call('zadd', deleting, now, member)
    return 1
  end,
  fail = function(member)
    if not string.match(redis.call('hget', attempts, member) or '0', '^%d%d?%d?%d?$') then
      redis.call('hdel', attempts, member) -- no count, and one that could not be raised
    end
    local count = redis.call('hincrby', attempts, member, 1)
    if count < tonumber(ARGV[3]) then
      redis.call('zadd', deleting, now + ARGV[4] * 2 ^ (count - 1), member)
      return 0
    end
    redis.call('zrem', deleting, member)
    redis.call('zadd', failed, now, member)
    return 1
  end,
}
local without_token = {
  found_deleted = function(member)
    -- One that is pending was registered anew.
    return redis.call('zscore', deleting, member) and drop(member) or 0
  end,
  retry = function(member, held)
    local waits = not held and redis.call('hexists', attempts, member) == 1 and redis.call('zscore', deleting, member)
    if redis.call('zrem', failed, member) == 0 and not waits then
      return 0
    end
    redis.call('zadd', deleting, now, member)
    redis.call('hdel', attempts, member)
    return 1
  end,
  withdraw = function(member, held)
    if not redis.call('zscore', adopted, member) then
      return 0
    elseif held and tonumber(redis.call('zscore', deleting, member) or 0) > now then
      return -1
    end
    redis.call('zrem', pending, member)
    return drop(member)
  end,
}

local answers, members, ours = {}, {unpack(ARGV, 5)}, {}
local holders = #members > 0 and redis.call('hmget', claims, unpack(members))
for i, member in ipairs(members) do
  local holder = holders[i]
  if without_token[what] then
    table.insert(answers, without_token[what](member, holder))
  elseif holder == token then
    table.insert(ours, member)
    table.insert(answers, of_claim[what](member))
  else
    table.insert(answers, what == 'fail' and redis.call('zscore', failed, member) and 1 or 0)
  end
end
if #ours > 0 then
  redis.call('hdel', claims, unpack(ours))
end
if #ours > 0 and what == 'forget' then
  drop(unpack(ours))
end
return answers
