"""The commands of batches: `batchwright batch`."""
