"""Is the gate routing? Statistics and auxiliary losses of every gate in a model, in any training loop."""

from comet_moe.monitor.routing_monitor import RoutingMonitor

__all__ = ["RoutingMonitor"]
