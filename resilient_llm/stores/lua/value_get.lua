-- Give a value and the milliseconds it lives; one that would live for ever was not meant to, and is forgotten.
--
-- KEYS: the value's. Reply: both, or nothing.
local value = redis.call('GET', KEYS[1])
if not value then return false end
local left = redis.call('PTTL', KEYS[1])
if left < 0 then
  redis.call('DEL', KEYS[1])
  return false
end
return {value, left}
