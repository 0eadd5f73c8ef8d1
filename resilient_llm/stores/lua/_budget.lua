-- What the scripts on budgets share: an account, on the server's clock.
--
-- KEYS: the reservations (a sorted set: when each comes back, by its id and two doubles: US dollars, tokens); the
-- account (a string: two doubles that total the reservations, then the names of the caps that were warned of); and for
-- each period what was spent in it (a string: five doubles for each slice: its number, US dollars, tokens, and how
-- much of either is estimated).
local FIELDS = '<ddddd'
local SLICE = 5 * 8
local AMOUNTS = 2 * 8

local function expire(keys, clock)
  -- Give the totals of what is reserved, and the caps that were warned of; forget what nobody came back for.
  local usd, tokens, warned = 0, 0, ''
  local raw = redis.call('GET', keys[2])
  local gone = redis.call('ZRANGEBYSCORE', keys[1], '-inf', string.format('%.6f', clock))
  for i = 1, #gone, 1000 do
    redis.call('ZREM', keys[1], unpack(gone, i, math.min(i + 999, #gone)))
  end
  if raw then
    usd, tokens = struct.unpack('<dd', raw)
    warned = string.sub(raw, AMOUNTS + 1)
    for i = 1, #gone do
      local u, t = struct.unpack('<dd', gone[i], #gone[i] - AMOUNTS + 1)
      usd, tokens = usd - u, tokens - t
    end
  else
    -- The server has thrown the totals away, to make room: what is reserved says what they are.
    local all = redis.call('ZRANGE', keys[1], 0, -1)
    for i = 1, #all do
      local u, t = struct.unpack('<dd', all[i], #all[i] - AMOUNTS + 1)
      usd, tokens = usd + u, tokens + t
    end
  end
  return usd, tokens, warned, #gone > 0
end

local function write(keys, usd, tokens, warned, idle)
  -- With nothing outstanding it is 0, whatever rounding has made of it.
  if redis.call('EXISTS', keys[1]) == 0 then
    usd, tokens = 0, 0
    if warned == '' then
      redis.call('DEL', keys[2])
      return 0, 0
    end
  end
  usd, tokens = math.max(0, usd), math.max(0, tokens)
  redis.call('SET', keys[2], struct.pack('<dd', usd, tokens) .. warned, 'PX',
    string.format('%.0f', math.ceil(idle * 1000) + 1000))
  return usd, tokens
end

local function position(given, at, clock)
  -- Where in a period the moment lies: given are kept and width in seconds of its slices, and for the calendar's periods
  -- (width 0) number and seconds left. Gives number, seconds left, kept, width, and where the next is given.
  local kept, width, number, ends_in
  kept, width, number, ends_in, at = struct.unpack('<dddd', given, at)
  if width > 0 then
    number = math.floor(clock / width)
    ends_in = math.max(0, (number + 1) * width - clock)
  end
  return {number = number, ends_in = ends_in, kept = kept, width = width}, at
end

local function counting(raw, place)
  -- The slices that count, oldest first.
  local slices = {}
  if not raw then return slices end
  for at = 1, #raw - SLICE + 1, SLICE do
    local number, usd, tokens, usd_estimated, tokens_estimated = struct.unpack(FIELDS, raw, at)
    if number > place.number - place.kept then
      slices[#slices + 1] = {number, usd, tokens, usd_estimated, tokens_estimated}
    end
  end
  return slices
end

local function ends_in(slice, place)
  -- Seconds until a slice counts no more.
  local later = slice[1] + place.kept - 1 - place.number
  if later <= 0 then return place.ends_in end
  if place.width == 0 then return place.ends_in end
  return place.ends_in + later * place.width
end
