-- Take an amount from each of several buckets, all or none, or keep a place in line.
--
-- KEYS: one per bucket. ARGV: doubles (most seconds to wait; for each bucket capacity, rate per second, amount, what
-- this caller has held there since its last try, when its turn was to come, and 1 if only one tenant draws on it, else
-- 0); the mode ("n": take or refuse, "h": or keep a place, "d": take now, into debt); the time, if it is not the
-- server's.
-- Reply: doubles: 1 taken, 2 place kept, 0 neither; seconds until it may be taken; seconds until to ask again; then
-- for each bucket its level for newcomers, seconds its pause lasts, when that was so, seconds this call waits for it,
-- and what it holds.
local most_wait, at = struct.unpack('<d', ARGV[1])
local mode = ARGV[2]
local clock = now(ARGV[3])
local raw = redis.call('MGET', unpack(KEYS))
local buckets, waits = {}, {}

local function seconds_for(bucket, ahead)
  if bucket.amount <= 0 then return 0 end
  local level = bucket.capacity - bucket.missing
  local seconds = 0
  if bucket.amount + ahead > level then
    seconds = (math.min(bucket.amount, bucket.capacity) + ahead - level) / bucket.rate
  end
  seconds = math.max(seconds, bucket.paused - clock)
  if seconds <= FORGIVEN then return 0 end
  return seconds
end

local wait, own_dry = 0, false
for i = 1, #KEYS do
  local capacity, rate, amount, mine, turn, own
  capacity, rate, amount, mine, turn, own, at = struct.unpack('<dddddd', ARGV[1], at)
  local bucket = read(raw[i], rate, clock)
  bucket.capacity, bucket.amount, bucket.own, bucket.mine, bucket.turn = capacity, amount, own == 1, mine, turn
  local ahead = 0
  if mine > 0 then
    -- Whoever kept a place does not wait for those behind; a newcomer waits for all who did.
    free(bucket, mine, turn)
  else
    ahead = bucket.held + bucket.older
  end
  local seconds = seconds_for(bucket, ahead)
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
local kept = {}
for i = 1, #KEYS do
  local bucket = buckets[i]
  kept[i] = 0
  -- While its tenant's own buckets are dry, nobody else's are held back for it.
  if verdict == 2
    and (bucket.own and (waits[i] > 0 or bucket.mine > 0) or not bucket.own and not own_dry and waits[i] > 0) then
    kept[i] = bucket.amount
    again = math.max(again, waits[i])
    if bucket.mine > 0 then
      -- Not before those whose turn is earlier, nor later than if it came only now.
      local newcomer = seconds_for(bucket, bucket.held + bucket.older)
      again = math.max(again, math.min(bucket.turn - bucket.updated, newcomer))
    end
  end
end
local reply = {}
for i = 1, #KEYS do
  local bucket, keep = buckets[i], kept[i]
  if verdict == 1 then
    bucket.missing = bucket.missing + bucket.amount
  elseif keep > 0 then
    hold(bucket, keep, bucket.updated + again)
  end
  if verdict > 0 or bucket.mine > 0 then
    write(KEYS[i], bucket, clock)
  end
  reply[i] = standing(bucket, bucket.capacity, clock) .. struct.pack('<dd', waits[i], keep)
end
return struct.pack('<ddd', verdict, wait, again) .. table.concat(reply)
