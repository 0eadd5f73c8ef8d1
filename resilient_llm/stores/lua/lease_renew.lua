-- Renew leases; one that was taken away is out again, beside the limit.
--
-- KEYS: the set of each lease. ARGV: seconds a lease lasts, the time if it is not the server's (else ''), and for each
-- key the lease's name. Reply: the numbers of those that were not there.
local lasts = tonumber(ARGV[1])
local clock = now(ARGV[2] ~= '' and ARGV[2])
local ends = stamp(clock + lasts)
local reply = {}
for i = 1, #KEYS do
  if redis.call('ZADD', KEYS[i], ends, ARGV[2 + i]) == 1 then
    reply[#reply + 1] = i
  end
  keep(KEYS[i], lasts)
end
return reply
