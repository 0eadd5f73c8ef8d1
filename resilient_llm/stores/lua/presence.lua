-- Note that a process is alive, and count those that were within the last seconds.
--
-- KEYS: the set of processes. ARGV: this one's id, seconds after which a silent one counts no longer, and "0" to leave.
-- Reply: how many there are.
local time = redis.call('TIME')
local clock = tonumber(time[1]) + tonumber(time[2]) / 1000000
local lasts = tonumber(ARGV[2])
if ARGV[3] == '0' then
  redis.call('ZREM', KEYS[1], ARGV[1])
else
  redis.call('ZADD', KEYS[1], string.format('%.6f', clock), ARGV[1])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.6f', clock - lasts))
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.ceil(lasts * 1000) + 1000))
return redis.call('ZCARD', KEYS[1])
