-- Give out a lease of several keys, all or none; refused by one, keep a place in its line.
--
-- KEYS: three per key (leases, places by age, places by when they are forgotten). ARGV: the lease's name, the place's,
-- seconds a lease lasts, seconds a place is kept (0: none is), the time if it is not the server's (else ''), and for
-- each key how many may be out. Reply: the number of the key that refused, or 0; how many leases of it, or of the last
-- one, are out; microseconds until the first of them ends (-1: none does).
local lease, place = ARGV[1], ARGV[2]
local lasts, place_lasts = tonumber(ARGV[3]), tonumber(ARGV[4])
local clock = now(ARGV[5] ~= '' and ARGV[5])
local refused, held = 0, 0
for i = 1, #KEYS, 3 do
  local most = tonumber(ARGV[5 + (i + 2) / 3])
  local ahead = places(KEYS[i + 1], KEYS[i + 2], clock)
  if ahead > 0 then
    ahead = redis.call('ZRANK', KEYS[i + 1], place) or ahead
  end
  held = count(KEYS[i], most - ahead, clock)
  if held + ahead >= most then
    refused = i
    break
  end
end

if refused == 0 then
  for i = 1, #KEYS, 3 do
    redis.call('ZADD', KEYS[i], stamp(clock + lasts), lease)
    keep(KEYS[i], lasts)
    if redis.call('ZREM', KEYS[i + 1], place) == 1 then
      redis.call('ZREM', KEYS[i + 2], place)
    end
  end
  return {0, held + 1, -1}
end

if place_lasts > 0 then
  for i = 1, refused, 3 do
    local known = redis.call('ZSCORE', KEYS[i + 1], place)
    if not known and i == refused then
      local last = redis.call('ZRANGE', KEYS[i + 1], -1, -1, 'WITHSCORES')
      local since = clock
      if last[2] then since = math.max(clock, tonumber(last[2]) + 0.000001) end
      redis.call('ZADD', KEYS[i + 1], stamp(since), place)
    end
    if known or i == refused then
      redis.call('ZADD', KEYS[i + 2], stamp(clock + place_lasts), place)
      keep(KEYS[i + 1], place_lasts)
      keep(KEYS[i + 2], place_lasts)
    end
  end
end
local first = redis.call('ZRANGE', KEYS[refused], 0, 0, 'WITHSCORES')
local again = -1
if first[2] then again = math.max(0, math.ceil((tonumber(first[2]) - clock) * 1000000)) end
return {(refused + 2) / 3, held, again}
