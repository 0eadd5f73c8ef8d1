-- Note what somebody takes for the right number of slots, and give the mean of what all do.
--
-- KEYS: the voters by their numbers, and by when these are forgotten. ARGV: the voter, its number, seconds that it
-- counts, the time if it is not the server's (else ''). Reply: the mean.
local lasts = tonumber(ARGV[3])
local clock = now(ARGV[4] ~= '' and ARGV[4])
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
redis.call('ZADD', KEYS[2], stamp(clock + lasts), ARGV[1])
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', stamp(clock))) do
  redis.call('ZREM', KEYS[1], gone)
  redis.call('ZREM', KEYS[2], gone)
end
keep(KEYS[1], lasts)
keep(KEYS[2], lasts)
local votes = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
local sum = 0
for i = 2, #votes, 2 do sum = sum + tonumber(votes[i]) end
return string.format('%.17g', sum / (#votes / 2))
