-- Put a circuit's record in the place of the one it was made from, or say which is there instead.
--
-- KEYS: the group's records (a hash: version and record by circuit; when it was made, by the empty name), and the
-- versions by circuit (a sorted set). ARGV: the circuit; the version that this process knows, 0 for none; the record,
-- with seconds left; the time, if it is not the server's.
-- A circuit that the server does not know takes any record: the server has lost it, or nobody had told.
-- Reply: doubles: 1 if it is the record now, when the group was made, its version; then the record, with seconds left.
local OLD = 86400 -- seconds after which a circuit that has not changed is forgotten; isolated ones are not
local SOME = 32
local ISOLATED = 3
local clock = now(ARGV[4])
local made = redis.call('HGET', KEYS[1], '')
if not made then
  made = string.format('%.0f', clock * 1000000)
  redis.call('HSET', KEYS[1], '', made)
end
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if raw then
  local version = struct.unpack('<d', raw)
  if version ~= tonumber(ARGV[2]) then
    return struct.pack('<ddd', 0, tonumber(made), version) .. shifted(string.sub(raw, 9), -clock)
  end
end
-- Rises by time, so that it does after the server has lost its memory too; and always, whatever its clock does.
local newest = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]
local version = math.max(math.floor(clock * 1000000), tonumber(newest or 0) + 1)
redis.call('HSET', KEYS[1], ARGV[1], struct.pack('<d', version) .. shifted(ARGV[3], clock))
redis.call('ZADD', KEYS[2], string.format('%.0f', version), ARGV[1])
local oldest = redis.call('ZRANGE', KEYS[2], 0, SOME - 1, 'WITHSCORES')
for i = 1, #oldest, 2 do
  if tonumber(oldest[i + 1]) < (clock - OLD) * 1000000 then
    local old = redis.call('HGET', KEYS[1], oldest[i])
    local _, state
    if old then _, state = struct.unpack('<dd', old, 9) end
    if state ~= ISOLATED then
      redis.call('HDEL', KEYS[1], oldest[i])
      redis.call('ZREM', KEYS[2], oldest[i])
    end
  end
end
keep(KEYS)
return struct.pack('<ddd', 1, tonumber(made), version) .. ARGV[3]
