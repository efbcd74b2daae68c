import sys, torch, torch.distributed as dist, scout_core
from tests.distributed.layouts import CASES
from tests.distributed.pool import RankPool
def probe(name):
    case = CASES[name]; job = case.build(1)
    s = scout_core.attach(job.model, job.optimizer, mesh=job.mesh, check_interval=1, oob_enabled=False, **case.options)
    job.train(2); r=s.last_result; s.close()
    return [(t["recipe"],t["operator"],t["ranks"],t["bytes"]) for t in r.collective_timings]
if __name__=="__main__":
    pool=RankPool(CASES[sys.argv[1]].ranks)
    print(*pool.run(probe, sys.argv[1], timeout=100)[5], sep="\n")
    pool.close()
