BEGIN TRANSACTION;
CREATE TABLE budget(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, collection TEXT NOT NULL REFERENCES collection,
  epsilon REAL NOT NULL CHECK(epsilon>0), delta REAL NOT NULL CHECK(delta>0 AND delta<1e-3), filter_order REAL NOT NULL,
  operator TEXT NOT NULL, reason TEXT NOT NULL, created_at TEXT NOT NULL) STRICT;
INSERT INTO "budget" VALUES(1,'north/train',2.0,1.0e-05,13.0,'dpo','half a year','2026-11-25T04:34:00.103035+00:00');
INSERT INTO "budget" VALUES(2,'north/train',3.0,1.0e-05,9.1,'dpo','yearly budget','2026-11-25T04:34:00.152657+00:00');
CREATE TABLE collection(
  name TEXT PRIMARY KEY, unit TEXT NOT NULL CHECK(unit IN('record','group','hospital')), created_at TEXT NOT NULL) STRICT;
INSERT INTO "collection" VALUES('north/train','group','2026-11-25T04:33:59.962234+00:00');
INSERT INTO "collection" VALUES('north/test','record','2026-11-25T04:34:00.052631+00:00');
CREATE TABLE dataset_version(
  fingerprint TEXT PRIMARY KEY, collection TEXT NOT NULL REFERENCES collection,
  records INTEGER NOT NULL, units INTEGER NOT NULL, registered_at TEXT NOT NULL) STRICT;
INSERT INTO "dataset_version" VALUES('ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','north/train',5,3,'2026-11-25T04:33:59.962234+00:00');
INSERT INTO "dataset_version" VALUES('eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee','north/train',4,4,'2026-11-25T04:33:59.981807+00:00');
INSERT INTO "dataset_version" VALUES('dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd','north/test',2,2,'2026-11-25T04:34:00.052631+00:00');
CREATE TABLE entry(
  id TEXT PRIMARY KEY, collection TEXT NOT NULL REFERENCES collection,
  fingerprint TEXT NOT NULL REFERENCES dataset_version, run TEXT NOT NULL, manifest TEXT NOT NULL,
  round INTEGER NOT NULL, attempt INTEGER NOT NULL, kind TEXT NOT NULL, created_at TEXT NOT NULL,
  UNIQUE(run, round, attempt, kind, collection)) STRICT;
INSERT INTO "entry" VALUES('run-1/0/train/0/north/train','north/train','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','run-1','mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm',0,0,'train','2026-11-25T04:34:02.286848+00:00');
INSERT INTO "entry" VALUES('run-1/1/train/0/north/train','north/train','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','run-1','mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm',1,0,'train','2026-11-25T04:34:02.425634+00:00');
INSERT INTO "entry" VALUES('run-1/2/train/0/north/train','north/train','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','run-1','mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm',2,0,'train','2026-11-25T04:34:02.449424+00:00');
INSERT INTO "entry" VALUES('run-1/3/train/0/north/train','north/train','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','run-1','mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm',3,0,'train','2026-11-25T04:34:02.456940+00:00');
INSERT INTO "entry" VALUES('run-1/4/train/0/north/train','north/train','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','run-1','mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm',4,0,'train','2026-11-25T04:34:02.468099+00:00');
INSERT INTO "entry" VALUES('run-3/0/train/0/north/train','north/train','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','run-3','nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn',0,0,'train','2026-11-25T04:34:37.848724+00:00');
INSERT INTO "entry" VALUES('run-1/5/train/0/north/train','north/train','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','run-1','mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm',5,0,'train','2026-11-25T04:34:38.123731+00:00');
INSERT INTO "entry" VALUES('run-1/6/train/0/north/train','north/train','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','run-1','mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm',6,0,'train','2026-11-25T04:34:38.169666+00:00');
CREATE TABLE event(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, entry TEXT REFERENCES entry, subject TEXT NOT NULL,
  state TEXT NOT NULL CHECK(state IN
    ('INTENT','RUNNING','SPENT','SPENT_ON_RECOVERY','REFUSED','RELEASED_UNUSED','BUDGET','REGISTERED','RESTORED',
     'KEPT','MIGRATED')),
  detail TEXT NOT NULL, prev_hash TEXT NOT NULL, hash TEXT NOT NULL, created_at TEXT NOT NULL) STRICT;
INSERT INTO "event" VALUES(1,NULL,'north/train','REGISTERED','{"fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "unit": "group", "records": 5, "units": 3, "digests": "0188fe5d840971f53726ddd09660e1eaece8577521719478cd43fdd1b7a9588a"}','0000000000000000000000000000000000000000000000000000000000000000','9eeb7f8169176b5cda7d793a42e7d795db0cbf374c36faab625139389e0a7f38','2026-11-25T04:33:59.962234+00:00');
INSERT INTO "event" VALUES(2,NULL,'north/train','REGISTERED','{"fingerprint": "eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee", "unit": "record", "records": 4, "units": 4, "digests": "a925e56ef3452edb96bb062fef110f685921aae58028c6ad2477b5ebda58ef4c"}','9eeb7f8169176b5cda7d793a42e7d795db0cbf374c36faab625139389e0a7f38','585c76fb672a930d05d7902ec5dc8bace85155d8adc9423b29833189c5469e0c','2026-11-25T04:33:59.981807+00:00');
INSERT INTO "event" VALUES(3,NULL,'north/test','REGISTERED','{"fingerprint": "dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd", "unit": "record", "records": 2, "units": 2, "digests": "981faed5333f477b5b9bac29b0c130efff843f7105a194158ede4962993c6f1f"}','585c76fb672a930d05d7902ec5dc8bace85155d8adc9423b29833189c5469e0c','50f0d80f6c9292c9058ea2d4c095302d1a588164c7ab17275e161a6fcc716309','2026-11-25T04:34:00.052631+00:00');
INSERT INTO "event" VALUES(4,NULL,'north/train','BUDGET','{"epsilon": 2.0, "delta": 1e-05, "order": 13, "operator": "dpo", "reason": "half a year"}','50f0d80f6c9292c9058ea2d4c095302d1a588164c7ab17275e161a6fcc716309','86af7a31d7ae89d9686d8e02550b6cedf95aa548955ea7578e619dd73854a3bc','2026-11-25T04:34:00.103035+00:00');
INSERT INTO "event" VALUES(5,NULL,'north/train','BUDGET','{"epsilon": 3.0, "delta": 1e-05, "order": 9.1, "operator": "dpo", "reason": "yearly budget"}','86af7a31d7ae89d9686d8e02550b6cedf95aa548955ea7578e619dd73854a3bc','a1a64e66fc2e6590063bac9e324ff89a11511727ca04e238d25d97d5a9973503','2026-11-25T04:34:00.152657+00:00');
INSERT INTO "event" VALUES(6,'run-1/0/train/0/north/train','run-1/0/train/0/north/train','INTENT','{"collection": "north/train", "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "run": "run-1", "manifest": "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm", "round": 0, "attempt": 0, "kind": "train", "owner": "3104ac9b46366251739b0fda9d9b2610", "coordinator": "consortium one", "mechanisms": [["training", 16.0, 0.5, 10], ["class counts", 12.5, 1.0, 1]]}','a1a64e66fc2e6590063bac9e324ff89a11511727ca04e238d25d97d5a9973503','726e74cf40baefc6defc0c03eaa0fc0bff7ca8d3611b688178d1598be2dea500','2026-11-25T04:34:02.286848+00:00');
INSERT INTO "event" VALUES(7,'run-1/0/train/0/north/train','run-1/0/train/0/north/train','RUNNING','','726e74cf40baefc6defc0c03eaa0fc0bff7ca8d3611b688178d1598be2dea500','cdaec00f90fe408f85545bc5437ea22826b2524e90eca3a01490ac962ff9dc33','2026-11-25T04:34:02.331650+00:00');
INSERT INTO "event" VALUES(8,'run-1/0/train/0/north/train','run-1/0/train/0/north/train','SPENT','abababababababababababababababababababababababababababababababab','cdaec00f90fe408f85545bc5437ea22826b2524e90eca3a01490ac962ff9dc33','33edc37ae5e63c7717a9da2d6fa0ba632f1e526b12e166df41102f82030c781a','2026-11-25T04:34:02.389729+00:00');
INSERT INTO "event" VALUES(9,'run-1/1/train/0/north/train','run-1/1/train/0/north/train','INTENT','{"collection": "north/train", "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "run": "run-1", "manifest": "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm", "round": 1, "attempt": 0, "kind": "train", "owner": "3104ac9b46366251739b0fda9d9b2610", "coordinator": "consortium one", "mechanisms": [["training", 16.0, 0.5, 10]]}','33edc37ae5e63c7717a9da2d6fa0ba632f1e526b12e166df41102f82030c781a','cf8e292cba4972eae755ed89c8bd1f856ab061061dd3c70a843b514ca902d2e1','2026-11-25T04:34:02.425634+00:00');
INSERT INTO "event" VALUES(10,'run-1/1/train/0/north/train','run-1/1/train/0/north/train','RUNNING','','cf8e292cba4972eae755ed89c8bd1f856ab061061dd3c70a843b514ca902d2e1','85d6b41849ece829df398d11f4ad38f5d767e92f9ebb5ba738140ecb3c53202e','2026-11-25T04:34:02.438631+00:00');
INSERT INTO "event" VALUES(11,'run-1/1/train/0/north/train','run-1/1/train/0/north/train','SPENT','abababababababababababababababababababababababababababababababab','85d6b41849ece829df398d11f4ad38f5d767e92f9ebb5ba738140ecb3c53202e','fed802701c21f88ce9f6b60eb705a30c56ee2891e31c4a4c9b0905e7941a285c','2026-11-25T04:34:02.446557+00:00');
INSERT INTO "event" VALUES(12,'run-1/2/train/0/north/train','run-1/2/train/0/north/train','INTENT','{"collection": "north/train", "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "run": "run-1", "manifest": "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm", "round": 2, "attempt": 0, "kind": "train", "owner": "3104ac9b46366251739b0fda9d9b2610", "coordinator": "consortium one", "mechanisms": [["training", 16.0, 0.5, 10]]}','fed802701c21f88ce9f6b60eb705a30c56ee2891e31c4a4c9b0905e7941a285c','f7a2a24ac2540f27b4d49d6a3779de5ccdeef367d5932897078ea60c4c83c44c','2026-11-25T04:34:02.449424+00:00');
INSERT INTO "event" VALUES(13,'run-1/2/train/0/north/train','run-1/2/train/0/north/train','RUNNING','','f7a2a24ac2540f27b4d49d6a3779de5ccdeef367d5932897078ea60c4c83c44c','338d6505bceb98bd7d481a6c5091cfd9768f9e729b5139e2284928795dd1c40a','2026-11-25T04:34:02.454328+00:00');
INSERT INTO "event" VALUES(14,'run-1/3/train/0/north/train','run-1/3/train/0/north/train','INTENT','{"collection": "north/train", "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "run": "run-1", "manifest": "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm", "round": 3, "attempt": 0, "kind": "train", "owner": "3104ac9b46366251739b0fda9d9b2610", "coordinator": "consortium one", "mechanisms": [["training", 16.0, 0.5, 10]]}','338d6505bceb98bd7d481a6c5091cfd9768f9e729b5139e2284928795dd1c40a','17cc6de5f11cbac0c07435a672e51ba39a12eaf2b26d5e67edb0296705794994','2026-11-25T04:34:02.456940+00:00');
INSERT INTO "event" VALUES(15,'run-1/3/train/0/north/train','run-1/3/train/0/north/train','RELEASED_UNUSED','released by the operator','17cc6de5f11cbac0c07435a672e51ba39a12eaf2b26d5e67edb0296705794994','b4e9c6e6a457c41b2875d5fc2f67876d87d8e9d77109b4ca9b7c083aa3227c16','2026-11-25T04:34:02.462630+00:00');
INSERT INTO "event" VALUES(16,'run-1/4/train/0/north/train','run-1/4/train/0/north/train','REFUSED','{"collection": "north/train", "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "run": "run-1", "manifest": "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm", "round": 4, "attempt": 0, "kind": "train", "owner": "3104ac9b46366251739b0fda9d9b2610", "coordinator": "consortium one", "mechanisms": [["training", 0.5, 1.0, 10]]}','b4e9c6e6a457c41b2875d5fc2f67876d87d8e9d77109b4ca9b7c083aa3227c16','ac599c35b092e0a42dfeb1599be51003690827b80f814da119b6b53449898603','2026-11-25T04:34:02.468099+00:00');
INSERT INTO "event" VALUES(17,NULL,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','KEPT','{"name": "class counts", "value": "[1.0, 2.0]"}','ac599c35b092e0a42dfeb1599be51003690827b80f814da119b6b53449898603','9364f9030ef4c568bfa10a8972c5b33648d0266913c0f6648782a3a808ccf6f7','2026-11-25T04:34:02.474640+00:00');
INSERT INTO "event" VALUES(18,NULL,'run-2','REFUSED','{"code": "E-POLICY-15", "coordinator": "consortium one", "times": 1}','9364f9030ef4c568bfa10a8972c5b33648d0266913c0f6648782a3a808ccf6f7','d89bac7cf4d535f45186f4dca51a9d17dafbc6acf70ca4145372767d2d91cfb1','2026-11-25T04:34:02.478419+00:00');
INSERT INTO "event" VALUES(19,'run-3/0/train/0/north/train','run-3/0/train/0/north/train','INTENT','{"collection": "north/train", "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "run": "run-3", "manifest": "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn", "round": 0, "attempt": 0, "kind": "train", "owner": "cdde5faf710fd2065f5be63a3724c35c", "coordinator": "consortium two", "mechanisms": [["training", 20.0, 0.25, 4]]}','d89bac7cf4d535f45186f4dca51a9d17dafbc6acf70ca4145372767d2d91cfb1','9dd582ca8d2261e21d1c9b5f4f139cbc13bd45bda033c001dcfcf0aee24d4ff4','2026-11-25T04:34:37.848724+00:00');
INSERT INTO "event" VALUES(20,'run-1/2/train/0/north/train','run-1/2/train/0/north/train','SPENT_ON_RECOVERY','open after a restart: counted in full','9dd582ca8d2261e21d1c9b5f4f139cbc13bd45bda033c001dcfcf0aee24d4ff4','0aa3cefc1e26570fbc3c984b4cba0b36a3bbc548b1e88b9b0161d81f3b018ff8','2026-11-25T04:34:38.112543+00:00');
INSERT INTO "event" VALUES(21,'run-3/0/train/0/north/train','run-3/0/train/0/north/train','SPENT_ON_RECOVERY','open after a restart: counted in full','0aa3cefc1e26570fbc3c984b4cba0b36a3bbc548b1e88b9b0161d81f3b018ff8','b5305292161d6003d66defd479823e34309c99e2a46507aa3553ba33d9de9fee','2026-11-25T04:34:38.112983+00:00');
INSERT INTO "event" VALUES(22,'run-1/5/train/0/north/train','run-1/5/train/0/north/train','INTENT','{"collection": "north/train", "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "run": "run-1", "manifest": "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm", "round": 5, "attempt": 0, "kind": "train", "owner": "3104ac9b46366251739b0fda9d9b2610", "coordinator": "consortium one", "mechanisms": [["training", 16.0, 0.5, 10]]}','b5305292161d6003d66defd479823e34309c99e2a46507aa3553ba33d9de9fee','ffa1b2a7e2da50361d4b80ac7d7b8f90b8580874ab853c7b0875224856afd4e1','2026-11-25T04:34:38.123731+00:00');
INSERT INTO "event" VALUES(23,'run-1/5/train/0/north/train','run-1/5/train/0/north/train','RUNNING','','ffa1b2a7e2da50361d4b80ac7d7b8f90b8580874ab853c7b0875224856afd4e1','d1baa8ef116678e27acbf03067f8cfc81e2a732da1633ddb76606e745dee1ce9','2026-11-25T04:34:38.158383+00:00');
INSERT INTO "event" VALUES(24,'run-1/6/train/0/north/train','run-1/6/train/0/north/train','INTENT','{"collection": "north/train", "fingerprint": "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff", "run": "run-1", "manifest": "mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm", "round": 6, "attempt": 0, "kind": "train", "owner": "3104ac9b46366251739b0fda9d9b2610", "coordinator": "consortium one", "mechanisms": [["training", 16.0, 0.5, 10]]}','d1baa8ef116678e27acbf03067f8cfc81e2a732da1633ddb76606e745dee1ce9','c426ac8f29ae32ff794d58cfd0834576b26287ff8ef5d2091110ee45dfc3c3be','2026-11-25T04:34:38.169666+00:00');
CREATE TABLE kept(
  fingerprint TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, created_at TEXT NOT NULL,
  PRIMARY KEY(fingerprint, name)) STRICT;
INSERT INTO "kept" VALUES('ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','class counts','[1.0, 2.0]','2026-11-25T04:34:02.474640+00:00');
CREATE TABLE mechanism(
  entry TEXT NOT NULL REFERENCES entry, idx INTEGER NOT NULL, purpose TEXT NOT NULL,
  noise REAL NOT NULL CHECK(noise>=0), rate REAL NOT NULL CHECK(rate>0 AND rate<=1),
  steps INTEGER NOT NULL CHECK(steps>0), PRIMARY KEY(entry, idx)) STRICT;
INSERT INTO "mechanism" VALUES('run-1/0/train/0/north/train',0,'training',16.0,0.5,10);
INSERT INTO "mechanism" VALUES('run-1/0/train/0/north/train',1,'class counts',12.5,1.0,1);
INSERT INTO "mechanism" VALUES('run-1/1/train/0/north/train',0,'training',16.0,0.5,10);
INSERT INTO "mechanism" VALUES('run-1/2/train/0/north/train',0,'training',16.0,0.5,10);
INSERT INTO "mechanism" VALUES('run-1/3/train/0/north/train',0,'training',16.0,0.5,10);
INSERT INTO "mechanism" VALUES('run-1/4/train/0/north/train',0,'training',0.5,1.0,10);
INSERT INTO "mechanism" VALUES('run-3/0/train/0/north/train',0,'training',20.0,0.25,4);
INSERT INTO "mechanism" VALUES('run-1/5/train/0/north/train',0,'training',16.0,0.5,10);
INSERT INTO "mechanism" VALUES('run-1/6/train/0/north/train',0,'training',16.0,0.5,10);
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
INSERT INTO "meta" VALUES('schema_version','2');
INSERT INTO "meta" VALUES('ledger_id','6f9e3f60d8388597268dddd59be90906');
INSERT INTO "meta" VALUES('key','8ea87c8570e1be1ed6b1f7fb2b985a5b4139768c7a1dc8aab9655bdede0ced2d');
INSERT INTO "meta" VALUES('unkeyed','0');
CREATE TABLE unit_digest(
  digest BLOB PRIMARY KEY, collection TEXT NOT NULL REFERENCES collection) STRICT, WITHOUT ROWID;
INSERT INTO "unit_digest" VALUES(X'2E9AD7F8BBEED9ABD5BAE66B27862D69355578CC21B7B75E3C42E73F48545EBD','north/train');
INSERT INTO "unit_digest" VALUES(X'5A3250B707D310BFF75E1874B42B42D6A2D7FCFA43D49B90C297EF2ABA761D73','north/test');
INSERT INTO "unit_digest" VALUES(X'7669B731D0D09874C8CC1A0DE30A403AC1DC8B26070B0F1AF77908C69D4FF806','north/train');
INSERT INTO "unit_digest" VALUES(X'9D1144648967769DB51B2BB484D3F8081AC774092B35FFCA96DE7F90A761DED7','north/train');
INSERT INTO "unit_digest" VALUES(X'C80FCB86699B9FEACF9A9B963BA7E59A099187F2314ADC8665A60D9238EE7356','north/test');
INSERT INTO "unit_digest" VALUES(X'D54DEDFA865C706BF7E2C5B2A2E075EC0FE949A06488667CE615FF0CC48CA29C','north/train');
INSERT INTO "unit_digest" VALUES(X'E8A50AC679172D78AD710BE486646D5A3BBBCE329A47F62481F2F21501F6B8E1','north/train');
INSERT INTO "unit_digest" VALUES(X'F36424C005F821FC030F63AF0770ECE940C45E0919453030938144B17C55BF1A','north/train');
INSERT INTO "unit_digest" VALUES(X'FE061500488C37758519675346F737576056514FA6C3CA42327B02817D0F53ED','north/train');
CREATE VIEW entry_state AS
  SELECT e.*, (SELECT state FROM event v WHERE v.entry=e.id ORDER BY seq DESC LIMIT 1) AS state FROM entry e;
CREATE VIEW charged AS
  SELECT s.collection, m.noise, m.rate, SUM(m.steps) AS steps FROM entry_state s JOIN mechanism m ON m.entry=s.id
  WHERE s.state IN('INTENT','RUNNING','SPENT','SPENT_ON_RECOVERY') GROUP BY 1,2,3;
CREATE TRIGGER event_noupd BEFORE UPDATE ON event BEGIN SELECT RAISE(ABORT,'event is append-only'); END;
CREATE TRIGGER event_nodel BEFORE DELETE ON event BEGIN SELECT RAISE(ABORT,'event is append-only'); END;
CREATE TRIGGER entry_noupd BEFORE UPDATE ON entry BEGIN SELECT RAISE(ABORT,'entry is append-only'); END;
CREATE TRIGGER entry_nodel BEFORE DELETE ON entry BEGIN SELECT RAISE(ABORT,'entry is append-only'); END;
CREATE TRIGGER mechanism_noupd BEFORE UPDATE ON mechanism BEGIN SELECT RAISE(ABORT,'mechanism is append-only'); END;
CREATE TRIGGER mechanism_nodel BEFORE DELETE ON mechanism BEGIN SELECT RAISE(ABORT,'mechanism is append-only'); END;
CREATE TRIGGER budget_noupd BEFORE UPDATE ON budget BEGIN SELECT RAISE(ABORT,'budget is append-only'); END;
CREATE TRIGGER budget_nodel BEFORE DELETE ON budget BEGIN SELECT RAISE(ABORT,'budget is append-only'); END;
CREATE TRIGGER kept_noupd BEFORE UPDATE ON kept BEGIN SELECT RAISE(ABORT,'kept is append-only'); END;
CREATE TRIGGER kept_nodel BEFORE DELETE ON kept BEGIN SELECT RAISE(ABORT,'kept is append-only'); END;
CREATE TRIGGER event_transition BEFORE INSERT ON event WHEN NEW.entry IS NOT NULL AND NOT EXISTS(
  SELECT 1 FROM (
    SELECT coalesce((SELECT state FROM event WHERE entry=NEW.entry ORDER BY seq DESC LIMIT 1),'') AS old)
  WHERE (old='' AND NEW.state IN('INTENT','REFUSED'))
     OR (old='INTENT' AND NEW.state IN('RUNNING','RELEASED_UNUSED','SPENT_ON_RECOVERY'))
     OR (old='RUNNING' AND NEW.state IN('SPENT','SPENT_ON_RECOVERY')))
  BEGIN SELECT RAISE(ABORT,'illegal ledger transition'); END;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('event',24);
INSERT INTO "sqlite_sequence" VALUES('budget',2);
COMMIT;
