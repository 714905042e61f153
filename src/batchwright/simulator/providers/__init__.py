"""Simulated batch APIs of outside providers, with one clock, one job model, and faults on demand.

Every provider has its paths under its name on one port, and `Server.urls` has the base URLs for clients. Signed URLs
are served by a second port, so that a credential sent there by mistake is detected: `Server.leaks`.

- Time: jobs are queued, run and end by the server's clock. In `running()` it is stopped; `Server.advance(60)` moves it.
- Answers: models echo the last message; an audio file's transcript follows from its name and bytes.
- Items fail by a marker in their text or file name: `[[fail]]`, `[[fail:429]]`, `__fail__`, `__fail_500__`;
  `[[tool]]` in a message asks for a call of the first tool.
- Faults: `Server.put_faults("drop:route=openai.create:times=1", "lag:seconds=30")`; `faults.WIRE` and `faults.JOB` list
  them. A credential that contains the word `wrong` is refused.
- Records: `Server.requests(route)`, `Server.jobs(marker, provider)`.

All of it is also at `/simulator/clock`, `/faults`, `/jobs`, `/requests`, `/stats`, `/providers` and `/reset`.
"""

from batchwright.simulator.providers.run import running
from batchwright.simulator.providers.server import Seen, Server
from batchwright.simulator.providers.world import ProviderSettings

__all__ = ["ProviderSettings", "Seen", "Server", "running"]
