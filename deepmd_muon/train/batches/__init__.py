"""The batches of training steps: converted on the host (`streamed`), or gathered on the device.

Frames that a device gathers (`resident`) take this way:

    systems ─→ frame_chunks ─→ frame_store ─────→ gathering ─→ TrainingBatch (`batch`)
               read, pack      upload             in the step
                   │               └─→ neighbor_counts ─→ frame_sizes ─→ shapes
               windows                                                   chosen before the step
               when to read
"""
