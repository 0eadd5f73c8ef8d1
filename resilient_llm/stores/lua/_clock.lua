-- The server's time in seconds; some managed services refuse TIME in scripts: then it comes from the clients.
local function now(given)
  if given then return tonumber(given) end
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end
