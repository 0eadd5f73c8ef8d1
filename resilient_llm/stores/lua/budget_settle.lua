-- Put what a call has cost in the place of what was reserved for it.
--
-- KEYS: as in _budget. ARGV: the reservation's id with its amounts, or "" for none; three doubles: US dollars and tokens
-- it has cost, 1 if that is estimated, and 1 if it may have been told before, so that it counts only for what is still
-- reserved; for each period what `position` takes; the time, if it is not the server's.
-- Reply: 1 if it was still reserved, else 0: it had come back meanwhile.
local clock = now(ARGV[4])
local usd, tokens, warned, expired = expire(KEYS, clock)
local found = 0
if ARGV[1] ~= '' then found = redis.call('ZREM', KEYS[1], ARGV[1]) end
if found == 1 then
  local u, t = struct.unpack('<dd', ARGV[1], #ARGV[1] - AMOUNTS + 1)
  usd, tokens = usd - u, tokens - t
end
local spent_usd, spent_tokens, estimated, again = struct.unpack('<dddd', ARGV[2])
if again == 1 and found == 0 then spent_usd, spent_tokens = 0, 0 end
local idle = math.max(0, redis.call('PTTL', KEYS[1]), redis.call('PTTL', KEYS[2])) / 1000
if spent_usd ~= 0 or spent_tokens ~= 0 then
  local at = 1
  for i = 3, #KEYS do
    local place
    place, at = position(ARGV[3], at, clock)
    local slices = counting(redis.call('GET', KEYS[i]), place)
    local last = slices[#slices]
    if last and last[1] > place.number then place.number = last[1] end
    if not last or last[1] < place.number then
      last = {place.number, 0, 0, 0, 0}
      slices[#slices + 1] = last
    end
    last[2], last[3] = last[2] + spent_usd, last[3] + spent_tokens
    if estimated == 1 then last[4], last[5] = last[4] + spent_usd, last[5] + spent_tokens end
    local parts = {}
    for j = 1, #slices do parts[j] = struct.pack(FIELDS, unpack(slices[j])) end
    local lasts = ends_in(last, place)
    -- What a clock of the calendar's that is behind still counts must not be gone by one that is ahead.
    if place.width == 0 then lasts = lasts + 86400 end
    redis.call('SET', KEYS[i], table.concat(parts), 'PX', string.format('%.0f', math.ceil(lasts * 1000) + 1000))
    idle = math.max(idle, lasts)
  end
end
if found == 1 or expired then write(KEYS, usd, tokens, warned, idle) end
return found
