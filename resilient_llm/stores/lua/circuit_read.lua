-- Give the circuits of a group that have changed since a version, oldest change first.
--
-- KEYS: as circuit_swap's. ARGV: when the group was made, as this process knows, 0 for not at all; the version; how many
-- at most; the time, if it is not the server's. Of a group that was made at another time all are given.
-- Reply: when the group was made; then for each circuit its name, and its version and record, with seconds left.
local clock = now(ARGV[4])
local made = redis.call('HGET', KEYS[1], '')
if not made then return {'0'} end
local since = ARGV[2]
if made ~= ARGV[1] then since = '0' end
local reply = {made}
local names = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. since, '+inf', 'LIMIT', 0, ARGV[3])
for i = 1, #names do
  local raw = redis.call('HGET', KEYS[1], names[i])
  if raw then
    reply[#reply + 1] = names[i]
    reply[#reply + 1] = string.sub(raw, 1, 8) .. shifted(string.sub(raw, 9), -clock)
  end
end
keep(KEYS)
return reply
