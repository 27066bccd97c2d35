"""Energy models of deepmd-kit behind the interface of this package; imported only if one is used."""
