-- Reserve an amount if it fits under all caps, or say how they stand.
--
-- KEYS: as in _budget; first the caps' periods, each once. ARGV: the reservation's id ("" to reserve nothing, and only
-- say how the caps stand); four doubles: US dollars, tokens, seconds after which they come back by themselves, 1 to
-- refuse what does not fit; for each period what `position` takes; for each cap four doubles: 1 for US dollars and 2 for
-- tokens, its period, limit, and share of it to be warned of; the caps' names, in lines; the time, if it is not the
-- server's.
-- Reply: doubles: 1 reserved or 0; the cap that refuses or 0, and in how many seconds it has room, -1 for never; what
-- is reserved of US dollars and tokens; then for each cap what is spent, estimated of that, seconds until all of it
-- counts no more, and 1 if a warning is due.
local ROUNDING = 1e-9
local IN_FLIGHT = 1
local clock = now(ARGV[6])
local id = ARGV[1]
local usd, tokens, lease, enforce = struct.unpack('<dddd', ARGV[2])
local amount = {usd, tokens}
local held_usd, held_tokens, warned, expired = expire(KEYS, clock)
local held = {held_usd, held_tokens}

local places, spendings = {}, {}
local at = 1
for i = 3, #KEYS do
  local place
  place, at = position(ARGV[3], at, clock)
  local slices = counting(redis.call('GET', KEYS[i]), place)
  local last = slices[#slices]
  -- On a clock that went backwards it is as of the latest slice.
  if last and last[1] > place.number then place.number = last[1] end
  places[#places + 1], spendings[#spendings + 1] = place, slices
end

local reply = {}
local crossed, news = {}, {}
local refused, longest = 0, 0
local cap = 0
local idle = lease
at = 1
for name in string.gmatch(ARGV[5], '[^\n]+') do
  cap = cap + 1
  local unit, period, limit, ratio
  unit, period, limit, ratio, at = struct.unpack('<dddd', ARGV[4], at)
  local place, slices = places[period], spendings[period]
  local spent, estimated, resets = 0, 0, 0
  for i = 1, #slices do
    spent, estimated = spent + slices[i][1 + unit], estimated + slices[i][3 + unit]
  end
  if #slices > 0 then
    resets = ends_in(slices[#slices], place)
    idle = math.max(idle, resets)
  end
  local due = 0
  if limit < math.huge and spent >= limit * ratio then
    crossed[#crossed + 1] = name
    if not string.find('\n' .. warned .. '\n', '\n' .. name .. '\n', 1, true) then due = 1 end
  end
  local wanted = amount[unit]
  local remaining = limit - spent - held[unit]
  if wanted - remaining > limit * ROUNDING or (wanted == 0 and remaining <= 0) then
    local wait = math.huge
    if wanted <= limit * (1 + ROUNDING) then
      local excess = spent + held[unit] + wanted - limit * (1 + ROUNDING)
      wait = IN_FLIGHT
      for i = 1, #slices do
        excess = excess - slices[i][1 + unit]
        if excess <= 0 then
          wait = ends_in(slices[i], place)
          break
        end
      end
    end
    if refused == 0 or wait > longest then refused, longest = cap, wait end
  end
  reply[cap] = struct.pack('<dddd', spent, estimated, resets, due)
end

local reserved = 0
if id ~= '' then
  if refused == 0 or enforce == 0 then
    reserved = 1
    redis.call('ZADD', KEYS[1], string.format('%.6f', clock + lease), id .. struct.pack('<dd', usd, tokens))
    local left = math.max(redis.call('PTTL', KEYS[1]), math.ceil(lease * 1000) + 1000)
    redis.call('PEXPIRE', KEYS[1], string.format('%.0f', left))
    idle = math.max(idle, left / 1000)
    held_usd, held_tokens = held_usd + usd, held_tokens + tokens
  end
  warned = table.concat(crossed, '\n')
end
if id ~= '' or expired then write(KEYS, held_usd, held_tokens, warned, idle) end
if longest == math.huge then longest = -1 end
return struct.pack('<ddddd', reserved, refused, longest, held[1], held[2]) .. table.concat(reply)
