-- What the scripts on leases share: sets of leases and lines of places, on the server's clock.
--
-- A key of a pool is three sorted sets: leases by when they end, places by when they were taken, and places by when
-- they are forgotten. core/leases.py is what they must amount to.
local function stamp(time)
  return string.format('%.6f', time)
end

-- Let a set expire some time after all that is in it has; never sooner than it would have anyway.
local function keep(key, seconds)
  local ms = math.ceil(seconds * 1000) + 1000
  if redis.call('PTTL', key) < ms then
    redis.call('PEXPIRE', key, string.format('%.0f', ms))
  end
end

-- Forget the places nobody came back to, and count the others.
local function places(queue, seen, clock)
  local waiting = redis.call('ZCARD', queue)
  if waiting == 0 then return 0 end
  local gone = redis.call('ZRANGEBYSCORE', seen, '-inf', stamp(clock))
  for _, place in ipairs(gone) do
    redis.call('ZREM', queue, place)
    redis.call('ZREM', seen, place)
  end
  waiting = waiting - #gone
  if redis.call('ZCARD', seen) ~= waiting then -- one of the two was evicted: all line up again
    redis.call('DEL', queue, seen)
    return 0
  end
  return waiting
end

-- Count the leases that are out. Those that have ended are taken away only where that makes room.
local function count(leases, most, clock)
  local held = redis.call('ZCARD', leases)
  if held >= most and redis.call('ZREMRANGEBYSCORE', leases, '-inf', stamp(clock)) > 0 then
    held = redis.call('ZCARD', leases)
  end
  return held
end
