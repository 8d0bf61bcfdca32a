-- needs: keys
-- Lets a server whose memory is full still finish the jobs it has. Redis then refuses a script's first write if it needs
-- memory, and no later one: so the first is one that needs none, and changes nothing.
call('HDEL', meta, '')
