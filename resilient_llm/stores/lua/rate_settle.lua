-- Give back what was taken and not used, charge what was used beyond it, and give up places in line.
--
-- KEYS: one per bucket. ARGV: for each bucket five doubles (capacity, rate per second, what is given back, or below 0
-- what is charged, what is held no longer, and for which turn it was); the time, if it is not the server's.
-- Reply: for each bucket three doubles: its level for newcomers, seconds its pause lasts, and when that was so.
local clock = now(ARGV[2])
local raw = redis.call('MGET', unpack(KEYS))
local reply = {}
local at = 1
for i = 1, #KEYS do
  local capacity, rate, back, freed, turn
  capacity, rate, back, freed, turn, at = struct.unpack('<ddddd', ARGV[1], at)
  local bucket = read(raw[i], rate, clock)
  if back >= 0 then
    bucket.missing = math.max(0, bucket.missing - back)
  else
    -- Never further into debt than one capacity.
    bucket.missing = math.min(bucket.missing - back, math.max(bucket.missing, 2 * capacity))
  end
  if freed > 0 then free(bucket, freed, turn) end
  write(KEYS[i], bucket, clock)
  reply[i] = standing(bucket, capacity, clock)
end
return table.concat(reply)
