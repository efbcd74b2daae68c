import sys
import torch, torch.distributed as dist
import scout_core
from tests.distributed.layouts import CASES
from tests.distributed.layouts.faults import LayoutFault, inject, kinds_on, layer_on
from tests.distributed.pool import RankPool


def probe(name, rank, kind):
    case = CASES[name]
    job = case.build(1)
    s = scout_core.attach(job.model, job.optimizer, mesh=job.mesh, check_interval=1, oob_enabled=False, **case.options)
    job.train(3)
    inject(LayoutFault(kind=kind, rank=rank, layer=layer_on(case, rank)), job)
    out = []
    for i in range(5):
        job.step()
        r = s.last_result
        out.append(
            (
                r.step,
                r.status.value,
                r.sdc_ranks,
                r.sdc_sources[:4],
                [m.message for m in r.inconclusive_reasons][:2],
                round(r.elapsed_ms),
            )
        )
    reps = [(x.kind.value, x.ranks, x.surface, x.message[:200]) for x in s.reports]
    s.close()
    return out, reps


if __name__ == "__main__":
    ranks = [int(x) for x in sys.argv[2].split(",")]
    kinds = sys.argv[3:]
    for name in sys.argv[1].split(","):
        pool = RankPool(CASES[name].ranks)
        for rank in ranks:
            for kind in kinds or kinds_on(CASES[name], rank):
                try:
                    res = pool.run(probe, name, rank, kind, timeout=100)
                    first = {}
                    for r, (out, _) in enumerate(res):
                        for o in out:
                            if o[2]:
                                first.setdefault(o[2], []).append((r, o[0]))
                    reps = sorted({x[:3] for r in res for x in r[1]})
                    print(
                        name,
                        kind,
                        "on",
                        rank,
                        "blamed",
                        {k: sorted({s for _, s in v}) for k, v in first.items()},
                        "reports",
                        reps,
                        flush=True,
                    )
                    if set(first) - {(rank,)} or not first or "-v" in sys.argv:
                        for r in range(len(res)):
                            print("    rank", r, *res[r][0][:3], sep="\n       ")
                except BaseException as e:
                    print(name, kind, rank, str(e)[:3000])
        pool.close()
