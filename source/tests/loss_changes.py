"""Changes of settings of the loss for which no other value follows from the declaration, or which act with others only."""

ATOMIC = {"start_pref_ae": 0.5, "limit_pref_ae": 1.0}
PREFACTORS = {"start_pref_pf": 0.5, "limit_pref_pf": 1.0}
LOSS_EXAMPLES = {
    "start_pref_ae": [ATOMIC],
    "limit_pref_ae": [ATOMIC],
    "start_pref_pf": [PREFACTORS],
    "limit_pref_pf": [PREFACTORS],
    "use_default_pf": [{"use_default_pf": True}, {"use_default_pf": True, **PREFACTORS}],
    "f_use_norm": [
        {"f_use_norm": True, "loss_func": "mae"},
        {"f_use_norm": True, "use_huber": True},
    ],
    "huber_delta": [
        {"huber_delta": 0.1},
        {"huber_delta": 0.1, "use_huber": True},
        {"huber_delta": (0.1, 0.2, 0.3), "use_huber": True},
    ],
}
