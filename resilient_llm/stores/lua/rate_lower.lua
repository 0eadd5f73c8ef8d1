-- Lower levels to what a provider says remains, and pause: a level is never raised, a pause never shortened.
--
-- KEYS: one per bucket. ARGV: for each bucket four doubles (capacity, rate per second, the highest level it may have,
-- and seconds in which nothing is given out); the time, if it is not the server's. Reply: as rate_settle's.
local clock = now(ARGV[2])
local raw = redis.call('MGET', unpack(KEYS))
local reply = {}
local at = 1
for i = 1, #KEYS do
  local capacity, rate, level, pause
  capacity, rate, level, pause, at = struct.unpack('<dddd', ARGV[1], at)
  local bucket = read(raw[i], rate, clock)
  bucket.missing = math.max(bucket.missing, math.min(capacity - level, 2 * capacity))
  if pause > 0 then bucket.paused = math.max(bucket.paused, clock + pause) end
  write(KEYS[i], bucket, clock)
  reply[i] = standing(bucket, capacity, clock)
end
return table.concat(reply)
