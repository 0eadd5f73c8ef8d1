-- Take back a lease, give up a place, or both, and tell those who are first in line that there is a lease for them.
--
-- KEYS: as lease_acquire's. ARGV: the lease's name, the place's (either may be ''), this process's, what the names of
-- processes' channels begin with, the time if it is not the server's (else ''), and for each key how many may be out.
-- Reply: "<place> <key>" for each of this process's own; the others' is published to theirs.
local lease, place, own = ARGV[1], ARGV[2], ARGV[3]
local clock = now(ARGV[5] ~= '' and ARGV[5])
local reply = {}
for i = 1, #KEYS, 3 do
  if lease ~= '' then redis.call('ZREM', KEYS[i], lease) end
  if place ~= '' then
    redis.call('ZREM', KEYS[i + 1], place)
    redis.call('ZREM', KEYS[i + 2], place)
  end
  if places(KEYS[i + 1], KEYS[i + 2], clock) > 0 then
    local most = tonumber(ARGV[5 + (i + 2) / 3])
    local free = most - count(KEYS[i], most, clock)
    if free > 0 then
      for _, first in ipairs(redis.call('ZRANGE', KEYS[i + 1], 0, free - 1)) do
        local process = string.match(first, '^[^.]*')
        if process == own then
          reply[#reply + 1] = first .. ' ' .. KEYS[i]
        else
          redis.call('PUBLISH', ARGV[4] .. process, first .. ' ' .. KEYS[i])
        end
      end
    end
  end
end
return reply
