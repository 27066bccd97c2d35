"""Sources of a step's batch: converted on the spot, streamed to the device, or gathered there."""
