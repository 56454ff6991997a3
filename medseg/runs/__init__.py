"""Run folders: status, signature, locks, processes; one training, and sweeps of many."""
