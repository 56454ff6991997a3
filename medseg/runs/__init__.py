"""Run folders: status, signature, locks, start and stop of processes, sweeps."""
