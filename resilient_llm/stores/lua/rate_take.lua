-- Take an amount from each of several buckets, all or none, or keep a place in line.
--
-- KEYS: one per bucket. ARGV: doubles (most seconds to wait; for each bucket capacity, rate per second, amount, what
-- this caller has held there since its last try, and 1 if only one tenant draws on it, else 0); the mode ("n": take or
-- refuse, "h": or keep a place, "d": take now, into debt); the time, if it is not the server's.
-- Reply: doubles: 1 taken, 2 place kept, 0 neither; seconds until it may be taken; seconds until to ask again; then
-- for each bucket its level for newcomers, seconds its pause lasts, when that was so, seconds this call waits for it,
-- and what it holds.
local most_wait, at = struct.unpack('<d', ARGV[1])
local mode = ARGV[2]
local clock = now(ARGV[3])
local raw = redis.call('MGET', unpack(KEYS))
local buckets, waits = {}, {}
local wait, own_dry = 0, false
for i = 1, #KEYS do
  local capacity, rate, amount, mine, own
  capacity, rate, amount, mine, own, at = struct.unpack('<ddddd', ARGV[1], at)
  local bucket = read(raw[i], rate, clock)
  bucket.capacity, bucket.amount, bucket.own, bucket.mine = capacity, amount, own == 1, mine
  free(bucket, mine)
  -- Whoever kept a place does not wait for those behind; a newcomer waits for all who did.
  local ahead = 0
  if mine == 0 then ahead = bucket.held + bucket.older end
  local seconds = 0
  if amount > 0 then
    local level = capacity - bucket.missing
    if amount + ahead > level then
      seconds = (math.min(amount, capacity) + ahead - level) / rate
    end
    seconds = math.max(seconds, bucket.paused - clock)
    if seconds <= FORGIVEN then seconds = 0 end
  end
  waits[i] = seconds
  if seconds > wait then wait = seconds end
  if bucket.own and seconds > 0 then own_dry = true end
  buckets[i] = bucket
end
local verdict, again = 0, wait
if wait == 0 or (mode == 'd' and wait <= most_wait) then
  verdict = 1
elseif mode == 'h' and wait <= most_wait then
  verdict, again = 2, 0
end
local reply = {}
for i = 1, #KEYS do
  local bucket = buckets[i]
  local keep = 0
  if verdict == 1 then
    bucket.missing = bucket.missing + bucket.amount
  elseif verdict == 2 then
    -- While its tenant's own buckets are dry, nobody else's are held back for it.
    if bucket.own and (waits[i] > 0 or bucket.mine > 0) or not bucket.own and not own_dry and waits[i] > 0 then
      keep = bucket.amount
      if waits[i] > again then again = waits[i] end
    end
  end
  if keep > 0 then
    bucket.held = bucket.held + keep
    bucket.held_until = math.max(bucket.held_until, clock + waits[i] + GRACE)
  end
  if verdict > 0 or bucket.mine > 0 then
    write(KEYS[i], bucket, clock)
  end
  reply[i] = standing(bucket, bucket.capacity, clock) .. struct.pack('<dd', waits[i], keep)
end
return struct.pack('<ddd', verdict, wait, again) .. table.concat(reply)
