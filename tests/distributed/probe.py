import sys, time, traceback
import torch, torch.distributed as dist
import scout_core
from tests.distributed.layouts import CASES
from tests.distributed.pool import RankPool


def probe(name):
    case = CASES[name]
    job = case.build(1)
    job.train(14)
    base = job.owned_state()
    job = case.build(1)
    out = []
    try:
        s = scout_core.attach(
            job.model, job.optimizer, mesh=job.mesh, check_interval=4, oob_enabled=False, **case.options
        )
    except Exception:
        return traceback.format_exc()
    assert s._peers.ranks == case.expected_peers(dist.get_rank()), s._peers.ranks
    for i in range(12):
        t = time.perf_counter()
        job.step()
        if s.last_result is not None and s.last_result.step == i + 1:
            r = s.last_result
            out.append(
                (
                    r.step,
                    r.status.value,
                    r.complete,
                    r.checked_recipe_ids,
                    [m.message for m in r.inconclusive_reasons][:3],
                    round(r.elapsed_ms),
                    len(r.collective_timings),
                )
            )
    try:
        r = s.check_now()
        out.append(
            (
                "now",
                r.status.value,
                r.complete,
                r.checked_recipe_ids,
                [m.message for m in r.inconclusive_reasons][:3],
                round(r.elapsed_ms),
            )
        )
    except Exception as e:
        out.append(repr(e))
    job.train(2)
    now = job.owned_state()
    same = all(torch.equal(base[k], now[k]) for k in base)
    s.close()
    return out, same


if __name__ == "__main__":
    for name in sys.argv[1:]:
        n = CASES[name].ranks
        pool = RankPool(n)
        try:
            res = pool.run(probe, name, timeout=100)
            for r in (0, n - 1):
                print(name, r, *(res[r] if isinstance(res[r], str) else [*res[r][0], res[r][1]]), sep="\n   ")
        except BaseException as e:
            print(name, str(e)[:6000])
        pool.close()
