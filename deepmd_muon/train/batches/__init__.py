"""The batches of training steps: made on the host (`streamed`), or gathered on the device.

`resident` makes the batches that the device gathers. Their frames take this way:

    systems ─→ frame_chunks ─→ frame_store ─────→ gathering ─→ TrainingBatch (`batch`)
               read, pack      upload             in the step
                   │               └─→ neighbor_counts ─→ frame_sizes ─→ shapes
               windows                                                   chosen before the step
               when to read

`device_sample` takes the same way without windows, for frames measured before the first step.
"""
