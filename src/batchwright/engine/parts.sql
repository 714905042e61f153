-- Fragments that statements of several files share.

-- part: deaths_max
-- A job whose worker died this often runs alone; the index `job_suspect` contains the same number.
2

-- part: private_mark
-- A queue whose name begins like this is served only by workers that name it.
'~'

-- part: paused_queues
ARRAY(SELECT name FROM batchwright.queue WHERE paused_at IS NOT NULL)
