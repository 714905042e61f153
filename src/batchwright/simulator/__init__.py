"""A simulated model server, with a model of its speed, a prefix cache, and faults on demand."""

from batchwright.simulator.profiles import PROFILES, Profile, named_model, profile
from batchwright.simulator.run import Remote, running, running_process
from batchwright.simulator.server import Simulator, SimulatorSettings

__all__ = [
    "PROFILES",
    "Profile",
    "Remote",
    "Simulator",
    "SimulatorSettings",
    "named_model",
    "profile",
    "running",
    "running_process",
]
