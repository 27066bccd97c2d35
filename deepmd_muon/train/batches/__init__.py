"""Where a step's batch comes from: converted on the spot, streamed to the device, or gathered there."""
