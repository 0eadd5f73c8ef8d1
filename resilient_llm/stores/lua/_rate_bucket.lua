-- What the scripts on rate limits share: a bucket as one string, on the server's clock.
--
-- Seven doubles: what is missing to its capacity, when that was so, what is held for those who wait their turn, until
-- when, until when nothing is given out, and what is held of older places, until when. Places in line are forgotten by
-- generation, a second after the last turn of all in it: those of the dead go with theirs, and no living one does. A
-- bucket that misses nothing needs no key: without one it is full.
local FORGIVEN = 1e-6 -- seconds: no clock here is finer
local GRACE = 1 -- seconds after which a place in line that nobody came back to is free
local BROKEN = 60 -- seconds by which no clock that works steps back
local FORMAT = '<ddddddd'

local function now(given)
  -- Some managed services refuse TIME in scripts: then it comes from the clients, whose clocks should agree.
  if given then return tonumber(given) end
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end

-- Hold so much until a turn has passed: where it is, its time alone says, and free finds it there.
local function hold(bucket, amount, turn)
  local till = turn + GRACE
  if till <= bucket.older_until then
    bucket.older = bucket.older + amount
  else
    bucket.held = bucket.held + amount
    bucket.held_until = math.max(bucket.held_until, till)
  end
end

-- Hold so much less of what was held for a turn.
local function free(bucket, amount, turn)
  if turn + GRACE <= bucket.older_until then
    bucket.older = math.max(0, bucket.older - amount)
  else
    bucket.held = math.max(0, bucket.held - amount)
  end
end

local function read(raw, rate, clock)
  local bucket = {
    rate = rate, missing = 0, updated = clock, held = 0, held_until = 0, paused = 0, older = 0, older_until = 0
  }
  if not raw then return bucket end
  local updated
  bucket.missing, updated, bucket.held, bucket.held_until, bucket.paused, bucket.older, bucket.older_until =
    struct.unpack(FORMAT, raw)
  -- A clock that steps back, as after a failover, stands still until it has caught up; one that was wrong does not.
  if updated > clock + BROKEN then
    updated = clock
    -- Nobody knows when the turn of whose place is over.
    bucket.held, bucket.held_until, bucket.older, bucket.older_until = 0, 0, 0, 0
  end
  local elapsed = math.max(0, clock - updated)
  bucket.missing = math.max(0, bucket.missing - elapsed * rate)
  bucket.updated = math.max(clock, updated)
  if bucket.older_until < clock and bucket.held_until > 0 then
    bucket.older, bucket.older_until = bucket.held, bucket.held_until
    bucket.held, bucket.held_until = 0, 0
  end
  if bucket.older_until < clock then bucket.older = 0 end
  return bucket
end

-- Say where a bucket stands: its level for newcomers, seconds its pause lasts, and when that was so.
local function standing(bucket, capacity, clock)
  return struct.pack('<ddd', capacity - bucket.missing - bucket.held - bucket.older,
    math.max(0, bucket.paused - clock), bucket.updated)
end

local function write(key, bucket, clock)
  local idle = math.max(bucket.missing / bucket.rate, bucket.paused - clock)
  if bucket.held > 0 then idle = math.max(idle, bucket.held_until - clock) end
  if bucket.older > 0 then idle = math.max(idle, bucket.older_until - clock) end
  if idle <= 0 then
    redis.call('DEL', key)
    return
  end
  redis.call('SET', key,
    struct.pack(FORMAT, bucket.missing, bucket.updated, bucket.held, bucket.held_until, bucket.paused,
      bucket.older, bucket.older_until),
    'PX', math.ceil(idle * 1000) + 1000)
end
