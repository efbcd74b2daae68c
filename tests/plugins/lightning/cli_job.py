"""A LightningCLI program: prints what callback the trainer came to have."""

from __future__ import annotations

import sys
from importlib import import_module

name = sys.argv.pop(1)
L = import_module(name)  # before SCOUT, which takes the Lightning that the job has imported
LightningCLI = import_module(f"{name}.cli").LightningCLI
ScoutCallback = import_module("scout_lightning").ScoutCallback

if __name__ == "__main__":
    cli = LightningCLI(import_module(f"{name}.demos.boring_classes").BoringModel, run=False, save_config_callback=None)
    for one in cli.trainer.callbacks:
        if isinstance(one, ScoutCallback):
            print("SCOUT", isinstance(one, L.Callback), one._config.replay.check_interval, one._dirpath, one.on_fault)
    print(sorted({"lightning", "pytorch_lightning"} & set(sys.modules)))
