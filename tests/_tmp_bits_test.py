from tests.test_rerank import *
def test_bits(reranker):
    for alg in (None,"serial","packed_segment","prefill_extend","packed_dense"):
        for n in range(3):
            o=reranker.rerank("Which city?", DOCUMENTS, algorithm=alg)
            d={r.index:r.relevance_score for r in o.results}
            print(alg,o.algorithm,o.usage,[d[i] for i in range(6)], d[0]==d[4])
