"""Where frames are stored: npy folders, HDF5, LMDB, files that ASE reads, and memory."""
