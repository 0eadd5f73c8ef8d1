-- What the scripts on circuits share: a record as one string, whose times are the server's, or seconds left.
--
-- Six doubles: generation, state, reason, when a probe may start, length of the next break, successes; then two for
-- each probe that is out: the generation it was let through in, and the end of its lease.
local FORMAT = '<dddddd'
local HEAD = 6 * 8
local KEPT = 30 * 86400 -- seconds: circuits that no process has asked about for so long are forgotten

local function shifted(record, seconds)
  -- From seconds left to times, or back.
  local generation, state, reason, wait, break_, successes, at = struct.unpack(FORMAT, record)
  wait = wait + seconds
  if seconds < 0 and wait < 0 then wait = 0 end
  local parts = {struct.pack(FORMAT, generation, state, reason, wait, break_, successes)}
  while at <= #record do
    local probe, lease
    probe, lease, at = struct.unpack('<dd', record, at)
    parts[#parts + 1] = struct.pack('<dd', probe, lease + seconds)
  end
  return table.concat(parts)
end

local function keep(keys)
  local lasts = string.format('%.0f', KEPT * 1000)
  for i = 1, #keys do redis.call('PEXPIRE', keys[i], lasts) end
end
